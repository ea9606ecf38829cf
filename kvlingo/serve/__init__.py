"""The gateway: an engine that runs models and translators, and an HTTP server in front of it."""
