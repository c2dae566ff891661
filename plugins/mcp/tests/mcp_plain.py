"""A server of MCP over stdio with what the probe needs of the SDK's, whose import takes a second a start."""

import json
import sys


class MCPServer:
    def __init__(self, name):
        self._name, self._tools = name, {}

    def tool(self):
        return lambda made: self._tools.setdefault(made.__name__, made)

    def run(self, transport):
        for line in sys.stdin:
            asked = json.loads(line)
            if "id" in asked:
                answer = self._answer(asked["method"], asked.get("params") or {})
                print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer}), flush=True)

    def _answer(self, method, given):
        if method == "initialize":
            about = {"name": self._name, "version": "1"}
            spoken = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": about}
            return {"result": spoken}
        if method == "tools/list":
            return {"result": {"tools": [self._shown(made) for made in self._tools.values()]}}
        if method == "tools/call":
            text = str(self._tools[given["name"]](**given.get("arguments") or {}))
            return {"result": {"content": [{"type": "text", "text": text}]}}
        return {"error": {"code": -32601, "message": "Method not found"}}

    def _shown(self, made):
        types = {name: kind for name, kind in made.__annotations__.items() if name != "return"}
        of = {name: {"type": {int: "integer", str: "string"}[kind]} for name, kind in types.items()}
        schema = {"type": "object", "properties": of, "required": list(of)}
        return {"name": made.__name__, "description": made.__doc__, "inputSchema": schema}
