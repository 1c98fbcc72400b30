"""Model families: what parameters a model has (specs), and how it computes (one short file per family that differs)."""

import nanotron.config.model  # noqa: F401  # its sections are made from the table of families, and that from its classes
