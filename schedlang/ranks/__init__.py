"""Facts that follow from a rank's own order, without times: the runtime needs them besides the
plan.
"""
