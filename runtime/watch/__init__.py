"""Where ranks stand, and what they say when one fails."""
