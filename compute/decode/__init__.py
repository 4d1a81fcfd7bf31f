"""A decode step of one token through the kernels, eagerly or as captured graphs."""
