"""Users' files: read with their faults said, written whole or not at all; and what is kept between
runs.
"""
