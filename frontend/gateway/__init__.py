"""The OpenAI-compatible server in front of an engine: HTTP, tenants, usage, metrics."""
