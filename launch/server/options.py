"""What a user can choose for the HTTP server; the group's options are elsewhere."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from protocol.errors import UsageError


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """`queue` requests may wait; `max_body` is bytes; `think` says whether a chat that does not say
    reasons first. An empty `model_name` means the checkpoint directory's name."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str = ""
    queue: int = 8
    max_body: int = 16 << 20
    max_connections: int = 256
    think: bool = False
    model_name: str = ""

    def __post_init__(self) -> None:
        if not self.loopback and not self.api_key:
            raise UsageError(
                f"--host {self.host} lets other machines in, so it needs an API key; set "
                "HEADRACE_API_KEY, or keep --host 127.0.0.1"
            )
        if self.api_key and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise UsageError("the API key has characters that HTTP headers cannot carry")

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
