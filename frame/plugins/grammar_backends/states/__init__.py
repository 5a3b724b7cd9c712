"""States of regular grammars: whether two outputs may go on alike, so that they share a mask."""
