"""What people see in a terminal: a chat, and live figures of a server."""
