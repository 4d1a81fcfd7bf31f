"""The model's own chat format: from messages to prompt tokens, and from reply tokens to messages.

Special tokens are ids here, never text: what a person or a tool wrote cannot become one, and what
the model writes is structure only where it sampled the token itself.
"""
