"""Working on items, for clients and ponds alike: items that finish themselves, loops over them, leases kept alive."""
