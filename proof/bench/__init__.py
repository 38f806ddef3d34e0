"""Figures that anyone can repeat: ours and a peer in one run on the same parts, round by round in turn."""
