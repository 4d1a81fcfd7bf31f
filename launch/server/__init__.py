"""The HTTP server: an OpenAI-compatible API, live figures, and the page that shows them."""
