"""What a schedule does on a transport: whether it is right, whether it ends, and when."""
