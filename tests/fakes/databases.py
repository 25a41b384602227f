"""A CAN database of a truck, with the two messages of SAE J1939 that everybody knows."""

TRUCK_DBC = """VERSION ""

NS_ :

BS_:

BU_: Engine

BO_ 2364540158 EEC1: 8 Engine
 SG_ EngineTorqueMode : 0|4@1+ (1,0) [0|15] "" Engine
 SG_ DriversDemandTorque : 8|8@1+ (1,-125) [-125|125] "%" Engine
 SG_ ActualEngineTorque : 16|8@1+ (1,-125) [-125|125] "%" Engine
 SG_ EngineSpeed : 24|16@1+ (0.125,0) [0|8031.875] "rpm" Engine

BO_ 2566844926 CCVS1: 8 Engine
 SG_ WheelBasedVehicleSpeed : 8|16@1+ (0.00390625,0) [0|250.996] "km/h" Engine

BA_DEF_ BO_  "VFrameFormat" ENUM  "StandardCAN","ExtendedCAN","reserved","J1939PG";
BA_DEF_DEF_  "VFrameFormat" "J1939PG";
"""
