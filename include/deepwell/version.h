/* The version: the only place where it is written. The build and the Python package read it. */
#ifndef DEEPWELL_VERSION_H
#define DEEPWELL_VERSION_H

#define DW_VERSION "0.1.0"

#endif
