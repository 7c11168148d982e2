/* The clock of the first GPU, as its driver's management library tells. */
#ifndef FATTNI_CLI_MEASURE_DEVICE_CLOCK_H
#define FATTNI_CLI_MEASURE_DEVICE_CLOCK_H

/* MHz of the multiprocessors now; 0 without that library or device. */
int device_clock(void);

#endif
