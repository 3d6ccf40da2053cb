"""Time and memory of many layouts at once, in columns: the figures from which a search makes its bounds."""
