"""MCP (Model Context Protocol): servers whose tools the agent may call, and nano as a server."""
