"""`nanotron report`: a run as one HTML page that stands alone."""
