"""Make, check, save and step environments; toy environments for tests and examples."""
