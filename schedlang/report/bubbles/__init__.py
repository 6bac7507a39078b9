"""Why ranks are idle, and what makes an execution as long as it is."""
