"""The state of a job whose ranks change, beside the least time that its bytes take."""
