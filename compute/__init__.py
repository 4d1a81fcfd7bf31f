"""The forward pass: dense weights, layers, sequence state, and what they ask of I/O."""
