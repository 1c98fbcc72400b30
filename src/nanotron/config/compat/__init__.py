"""What files and scripts of Hugging Face's Nanotron say that our sections do not.

retired.py    keys that do nothing here, or that are refused: the table, and the decorator that lets a section take them
shapes.py     old shapes of keys that we have
translate.py  both, on a file: before it is validated, so that the sections hold only keys that do something
"""
