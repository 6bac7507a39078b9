"""What editors ask: the language server, and colours."""
