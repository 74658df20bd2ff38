"""Baselines: what reward a rollout's task was expected to earn, estimated without that rollout.

Pure numpy in, numpy out. Knows nothing of the database, the clock, the network or the environment;
only `embedding` may load a neural network, and only inside a function.
"""
