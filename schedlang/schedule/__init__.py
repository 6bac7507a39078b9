"""The one intermediate form: what runs where, in which order, and what it costs. Pure data."""
