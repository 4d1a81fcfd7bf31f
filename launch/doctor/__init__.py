"""`headrace doctor`: what this machine gives, what the checkpoint needs, and what follows."""
