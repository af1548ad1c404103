"""The last calls of a program that may never end, which are written when something happens."""
