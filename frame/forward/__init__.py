"""Ways to compute a step's forward pass besides a call of the model with one attention backend: two
backends, recorded calls, `torch.compile`. `entrypoints.processes.components` chooses them.
"""
