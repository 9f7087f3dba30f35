"""Experiments: one file a question, each a function that the command line calls."""
