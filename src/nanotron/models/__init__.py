"""Model families: what parameters a model has (specs), and how it computes (one short file per family)."""
