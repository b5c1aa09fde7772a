"""An HTTP server in OpenAI's shape; needs the extra `serve`. Nothing else imports it."""
