"""Files and jobs of the Batch API, in a folder that several servers may share."""
