"""Accuracy of a variant in a step: error of each call and module, and the calls that explain the error of results."""
