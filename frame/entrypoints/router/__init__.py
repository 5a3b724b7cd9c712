"""`frame router`: one HTTP address in front of several servers of the same model."""
