"""Where tokens and texts come from: file formats, data sets of the hub, the user's own functions."""
