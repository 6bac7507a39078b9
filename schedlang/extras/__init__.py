"""What stands on the line from a program to its plan; each can be left out."""
