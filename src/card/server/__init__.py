"""An HTTP server in OpenAI's shape; needs `pip install 'card-decoding[serve]'`. Nothing else imports it."""
