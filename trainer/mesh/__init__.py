"""Who is where: rank arithmetic (`topology`, pure) and the same with live process groups (`context`)."""
