"""One module a kind of layer; each kernel's arithmetic is a plain function of tensors."""
