"""The tests, a package so that worker processes can import the functions a test sends them."""
