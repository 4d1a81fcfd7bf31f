"""The text the demo model is trained on: which packages, under which licences.

Owns nothing but this list. Every source is a package of Debian's main archive, free under Debian's
guidelines with its full terms in the `copyright` file inside, or a package of PyPI with its licence
inside.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Source:
    """One package, the licence of what is read of it, and by which reader of `corpus.READERS`.

    `version` is given for a package of PyPI and empty for one of Debian.
    """

    package: str
    licence: str
    reader: str = "pages"
    version: str = ""


SOURCES = (
    Source("linux-doc-6.1", "GPL-2.0 with the kernel's notes"),
    Source("python3.11-doc", "PSF-2.0"),
    Source("postgresql-doc-15", "PostgreSQL"),
    Source("cmake-doc", "BSD-3-Clause"),
    Source("llvm-16-doc", "Apache-2.0 with LLVM exception"),
    Source("git-doc", "GPL-2.0"),
    Source("apache2-doc", "Apache-2.0"),
    Source("python-django-doc", "BSD-3-Clause"),
    Source("python-sqlalchemy-doc", "MIT"),
    Source("neutron-doc", "Apache-2.0"),
    Source("nova-doc", "Apache-2.0"),
    Source("sqlite3-doc", "public domain"),
    Source("libboost1.81-doc", "BSL-1.0"),
    Source("rust-doc", "MIT or Apache-2.0"),
    Source("python-celery-doc", "BSD-3-Clause"),
    Source("python-dask-doc", "BSD-3-Clause"),
    Source("python-pandas-doc", "BSD-3-Clause"),
    Source("erlang-doc", "Apache-2.0"),
    Source("debian-policy", "GPL-2.0-or-later"),
    Source("developers-reference", "GPL-2.0-or-later"),
    Source("debian-reference-en", "GPL-2.0-or-later"),
    Source("installation-guide-amd64", "GPL-2.0"),
    Source("r-doc-html", "GPL-2.0-or-later"),
    Source("libglib2.0-doc", "LGPL-2.1-or-later"),
    Source("libgtk-3-doc", "LGPL-2.0-or-later"),
    Source("openjdk-17-doc", "GPL-2.0 with Classpath exception"),
    Source("qtbase5-doc-html", "GFDL-1.3 without invariant sections"),
    Source("qtdeclarative5-doc-html", "GFDL-1.3 without invariant sections"),
    Source("qt3d5-doc-html", "GFDL-1.3 without invariant sections"),
    Source("libgtk-4-doc", "LGPL-2.1-or-later"),
    Source("libreoffice-help-en-us", "MPL-2.0"),
    Source("ghc-doc", "BSD-3-Clause"),
    Source("postfix-doc", "EPL-2.0 or IPL-1.0"),
    Source("exim4-doc-html", "GPL-2.0-or-later"),
    Source("wx3.2-doc", "wxWindows documentation licence"),
    Source("perl-doc", "Artistic-1.0-Perl or GPL-1.0-or-later", "pods"),
    Source("golang-1.19-src", "BSD-3-Clause", "comments"),
    Source("botocore", "Apache-2.0", "service models", "1.44.8"),
    Source("google-api-python-client", "Apache-2.0", "discovery", "2.202.0"),
    Source("oci", "UPL-1.0 or Apache-2.0", "docstrings", "2.189.0"),
    Source("ansible", "GPL-3.0-or-later", "ansible", "12.3.0"),
    Source("linux-source-6.1", "GPL-2.0", "comments"),
    Source("gcc-12-source", "GPL-3.0-or-later", "comments"),
)
