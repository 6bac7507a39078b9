"""What scripts and notebooks have beside the commands."""
