"""What differs between two schedules: rank by rank, and in what they cost."""
