"""`headrace pack`: an aligned copy of a checkpoint's experts."""
