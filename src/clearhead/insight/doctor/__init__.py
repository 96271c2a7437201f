"""The doctor: examines anybody's transformer from outside, by what moves when something else is changed."""
