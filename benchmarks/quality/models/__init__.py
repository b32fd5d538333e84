"""Suite `quality-models`: weights and KV caches of any model beside other methods, in one run."""
