"""An HTTP server in OpenAI's shape; needs the extra `serve`. No other package imports it."""
