"""Many runs of a schedule whose times vary."""
