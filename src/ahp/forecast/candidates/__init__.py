"""What many layouts take and hold at once, as columns: the figures of which a search makes its bounds."""
