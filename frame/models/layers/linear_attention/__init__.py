"""Linear attention: layers whose past is one state a sequence."""
