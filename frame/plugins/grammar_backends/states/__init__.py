"""States of regular grammars: tells whether two outputs may go on alike, so that they share a mask."""
