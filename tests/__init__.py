"""The tests, in the rooms of `schedlang/` and `runtime/` that they are about; `project/` is about
the repository as a whole, and `support/` has what they share.
"""
